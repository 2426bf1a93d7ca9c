"""File transfer from model hubs, pinned and verified."""

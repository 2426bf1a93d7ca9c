"""Which frames, at which times: finding videos, opening them, choosing frames."""

"""Feature vectors of videos: extraction, files and stores."""

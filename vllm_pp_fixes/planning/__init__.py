"""Where the bytes of a checkpoint go when its layers are split over stages; nothing in here is imported in a server."""

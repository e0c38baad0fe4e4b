"""What runs inside a user's server."""

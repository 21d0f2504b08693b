"""The commands, composed of all rooms: one table of them, and those of the core."""

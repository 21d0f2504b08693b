"""Parts of a captured module, its repeated block, head and tail, and their cuts over tensor ranks."""

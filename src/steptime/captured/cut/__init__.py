"""Parts of a captured module (repeated block, head and tail), and how they are sharded over tensor-parallel ranks."""

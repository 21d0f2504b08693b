"""One job has one answer: every command that can be asked for it, held against ``estimate``."""

"""What users touch: the commands, the Python interface, reports, and files in the formats of other tools."""

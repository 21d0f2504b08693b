"""Real models, captured as graphs, costed operator by operator, and fitted into the memory of a device."""

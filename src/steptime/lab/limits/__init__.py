"""How far a training run can scale before data movement stops it."""

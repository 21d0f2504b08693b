"""Laboratory: measurements, the models fitted to them, and the errors of predictions."""

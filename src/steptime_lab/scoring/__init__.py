"""Tables of measurements scored: read, predicted, summed up, written row by row."""

"""Commands of studies: many jobs of one file, which devices to buy, what one more of something is worth."""

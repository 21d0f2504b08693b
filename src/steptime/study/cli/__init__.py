"""Commands of studies: many jobs of one file, devices to buy, shadow prices."""

"""Jobs beyond one uniform step: sequences of unequal lengths, phases of learning, unlike groups of devices."""

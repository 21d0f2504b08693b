"""A captured module as a workload: its repeated block, what surrounds it, and how tensor ranks can cut it."""

"""In what order the passes of a step run: schedules as tables of actions, played event by event."""

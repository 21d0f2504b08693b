"""Pure formulas: numbers or arrays in, numbers or arrays out.

Nothing here knows a device, a model or a plan; a caller passes plain numbers in SI units. Every function
broadcasts, so one plan and a block of a million plans go through the same line.
"""

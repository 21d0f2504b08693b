"""Jobs over devices of several kinds, or over several sites with a slow link: unequal stages, unequal shares."""

"""Reports of the room: text for the terminal, a picture of the graph before and after."""

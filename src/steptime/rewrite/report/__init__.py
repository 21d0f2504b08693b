"""Reports on rewritten graphs: text for the terminal, a picture of the graph before and after."""

"""The command ``steptime``: one file per command, imported only when that command runs."""

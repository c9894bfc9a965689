"""kvblocks inside existing engines. Each module or folder uses only the public names of kvblocks."""

"""kvblocks inside engines that exist. Each module or folder uses the public names of kvblocks only."""

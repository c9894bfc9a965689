"""The ecosystem's formats: what others call blocks, and how they tell each other of them."""

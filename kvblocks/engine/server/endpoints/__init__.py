"""What clients and routers ask beside answers: what is served (`about`), and texts as tokens (`tokens`)."""

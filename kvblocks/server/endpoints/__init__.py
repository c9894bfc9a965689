"""Further endpoints for clients and routers: what is served (`about`), and texts to tokens and back (`tokens`)."""

"""Further endpoints for clients and routers: what is served (`about`), and conversion of texts and tokens (`tokens`)."""

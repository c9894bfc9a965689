"""Layers that keep a state instead of K and V. `mixer` says what such a layer is; the other modules are the kinds."""

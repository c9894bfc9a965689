"""Several servers behind a router (`python -m bench.fleet`), and traces over many workers (`bench.fleet.traces`)."""

"""Models in neutral terms, and the ``config.json`` that says so."""

"""Files of records."""

import json


def write_jsonl(path, records):
    """Writes a line of JSON for each record; returns the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path

"""Output: results, formats, the report page and shards."""

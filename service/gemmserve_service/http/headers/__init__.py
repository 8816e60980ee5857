"""Header fields: parsing and rendering of ranges, preferences, digests, content codings, upload fields."""

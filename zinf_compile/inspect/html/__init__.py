"""A plan as one offline HTML page: a summary, charts, and a table of the largest values."""

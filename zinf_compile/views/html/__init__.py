"""A plan as one page of HTML that needs no network: what it comes to, charts, and where every large value lives."""

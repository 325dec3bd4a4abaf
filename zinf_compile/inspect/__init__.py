"""Views of plans and runs: text, HTML pages, traces, differences, explanations and what-if."""

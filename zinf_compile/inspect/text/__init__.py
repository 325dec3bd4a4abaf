"""How plans become text: tables and folded rows, short names of many parameters, files written whole."""

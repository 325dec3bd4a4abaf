"""Which tier each copy lives on."""

"""The records that everything agrees on: plans, facts, ops, sizes, errors, the glossary, and how plans are saved."""

"""Everything that is checked and measured on a GPU. day.sh runs it; calls.py says what it does."""

"""shoal: a web scraper that starts with one command and grows to many machines."""

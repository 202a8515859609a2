"""Parts for shoal that need nothing but files: a frontier, a dispatch and an exporter.

pip install ./examples/plugin
shoal crawl https://example.com --frontier journal://crawl.journal --out pages.tsv
"""

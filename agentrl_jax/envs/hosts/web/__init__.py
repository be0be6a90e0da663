"""Web pages in a real browser: Chromium, pages as text, tasks and scoring."""

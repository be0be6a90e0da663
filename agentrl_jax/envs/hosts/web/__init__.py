"""Pages in a real browser: Chromium, what it shows as text, tasks, and what they earn."""

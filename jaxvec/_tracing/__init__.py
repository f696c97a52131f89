"""What happened when: spans of time, a timeline of them, and what they add up to."""

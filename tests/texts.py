"""Ordinary texts of at least thirty tokens."""

TEXTS = (
    "The lighthouse keeper climbed the spiral stairs every evening and counted each of the one "
    "hundred and twelve steps aloud, so that he never lost track in the dark.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(",
    "Water boils at 100 degrees Celsius at sea level, but on top of a high mountain it boils at "
    "a lower temperature, because the pressure of the air is lower there.",
    "Dear Dr. Meyer, thank you for your letter of 14 March. We are pleased to confirm that your "
    "appointment was moved to Tuesday, 2 April, at half past nine.",
    "Q: What is the capital of France?\nA: Paris.\nQ: What is the capital of Japan?\nA: Tokyo.\n"
    "Q: What is the capital of Canada?\nA:",
)

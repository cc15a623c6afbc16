"""Readers and makers of questions: benchmark files, and the picture world of pixelis-nano."""

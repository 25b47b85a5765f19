"""Tests that run a real engine."""

"""Worlds on hosts: servers, simulators and Python objects behind one small interface."""

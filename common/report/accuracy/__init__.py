"""The accuracy study in words and pictures: its tables, figures and page."""

"""What a browser with ComfyUI's page open is told, and what it may ask for; the page's own side is in web/."""

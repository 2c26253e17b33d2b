"""pxrs"""

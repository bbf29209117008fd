"""The values of settings of data that programs offer on their command lines; it imports no reader."""

from toolkit import index

OF_FOLDERS_ALONE = ("voc", "yolo", "csv")
FORMATS = ("auto", *index.READERS, *OF_FOLDERS_ALONE)  # values of `data.format`
CROWDS = ("ignore", "objects")  # values of `data.crowds`

"""The values of settings of data that programs offer on their command lines; it imports no reader."""

from toolkit import index

# The module in `toolkit.data.formats` of each format of folders, in the order in which they are tried: the surest signs
# first.
FOLDERS = {"hub": "hub_folder"}
FOLDERS |= {name: name for name in "voc coco yolo csv labelme via cvat label_studio supervisely".split()}
OF_FOLDERS_ALONE = tuple(name for name in FOLDERS if name not in index.READERS)
FORMATS = ("auto", *index.READERS, *OF_FOLDERS_ALONE)  # values of `data.format`
CROWDS = ("ignore", "objects")  # values of `data.crowds`
